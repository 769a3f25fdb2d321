"""What is read: a corpus or a file of tokens, and which rank gets which sample."""
