"""Whose turn it is: a queue for each expert, batches, and the workers that compute them."""
