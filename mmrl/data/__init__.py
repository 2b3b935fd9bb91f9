"""Dataset rows become prompts and images."""
