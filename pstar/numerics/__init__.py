"""What an update computes with: dtypes of the states, the gradients' norm, the loss scale."""
