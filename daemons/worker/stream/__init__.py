"""The Execute stream: claims, plans in, results out, and the one thread between them."""
