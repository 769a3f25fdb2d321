"""What is read: a corpus, a file of tokens or samples of one's own, and which rank gets which."""
