"""Faults that the field has reported, as users' scripts, each with what is wrong written down
before any of them was judged; and sound programs of unusual shape, which must hold."""
