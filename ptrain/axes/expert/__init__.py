"""The expert axis: each rank has some of a layer's experts, and tokens travel to theirs."""
