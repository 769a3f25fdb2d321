"""The tensor axis: which plans are legal, which sums they take, how operators are cut."""
