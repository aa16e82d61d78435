"""Files of prompts through a batch whose finished rows are filled again."""
