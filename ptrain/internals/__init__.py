"""What torch calls private and is used all the same, by part of torch and by version."""
