"""The cost model: time of operators, collectives and wrappers on a machine."""
