"""The tokenizer daemon: text and chats to ids, and back at once."""

from radixmesh.daemons.runtime.grpc_polling import poll_without_engine

poll_without_engine()
