"""The receivers of a load: a mesh over gRPC, or any OpenAI server over HTTP."""
