"""``plan``: which drafter, how many drafts, which batch size, measured on the user's prompts."""
