"""A query waits: it is prepared, stands in an order, and gets its answer."""
