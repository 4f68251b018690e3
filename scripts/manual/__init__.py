"""Pages of the documentation that the code writes: options, metrics, errors, and the API."""
