"""Arrays only: centring, the factor, its packed storage, rounding to a storage dtype, and the inverse scale."""
