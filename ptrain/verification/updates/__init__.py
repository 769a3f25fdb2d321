"""Why an update is not one device's: it is repeated on what the optimizer was given."""
