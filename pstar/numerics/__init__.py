"""Numbers of an update: dtypes of parameters and states, the gradients' norm, the loss scale."""
