"""A model folder as daemons without its weights read it: fingerprint, vocabulary, default sampling."""
