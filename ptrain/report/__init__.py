"""What the reader sees: records, tables, differences, and pages as text."""
