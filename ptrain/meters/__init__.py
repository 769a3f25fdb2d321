"""Memory and traffic measurement. Never imports predictions."""
