"""Networks. They know tokens and times, and nothing of diffusion."""
