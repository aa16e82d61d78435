"""The distribution that tokens are drawn from, draws from it, logits processors."""
