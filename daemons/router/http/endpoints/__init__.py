"""The endpoints of the HTTP server, each with the body that it takes."""
