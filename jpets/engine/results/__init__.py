"""From the arrays of a batch to the results of its queries, and what is counted."""
