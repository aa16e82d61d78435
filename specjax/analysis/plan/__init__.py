"""``plan``: finds the fastest drafter, number of drafts and batch size for the user's prompts."""
