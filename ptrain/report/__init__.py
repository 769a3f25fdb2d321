"""Output: records, tables and differences."""
