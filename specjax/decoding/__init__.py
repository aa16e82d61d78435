"""The compiled loop: prompt reading, rounds, the state that rounds carry, and what they count."""
