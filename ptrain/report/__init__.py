"""What the reader sees: records, tables and differences."""
