"""What is known of a model without torch: names, parameters, stages and roles."""
