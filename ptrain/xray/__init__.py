"""The X-ray: infer the placement of an unmodified training job from the state of its ranks."""
