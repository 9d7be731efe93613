"""Requests on their way through the router: made, journalled, delivered, resumed."""
