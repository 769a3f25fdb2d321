"""Expert axis: experts sharded over ranks, and token dispatch."""
