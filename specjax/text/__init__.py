"""Text in, text out: prompts, drafter names, stop strings, streaming, chats."""
