"""The demonstration: an order saga whose service is killed, for real, while a live view shows that nothing is lost."""
