"""Addresses of schedulers from outside: files, DNS names, Docker, Kubernetes."""
