"""The spec: grammar, reader, writer, error messages, and the layout of ranks."""
