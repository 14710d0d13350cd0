"""One Dense-norm-Dense block: reading it, contracting it, evaluating it, costing it and certifying it."""
