"""Storage of KV pages below host memory: disk, Redis, S3, NIXL and Mooncake, by content, behind one seam.

`keys.py` names pages by content, `records.py` is what is stored for each, `backend.py` the seam that a medium
implements, `store.py` the queues, verification and back-off that all of them share, `opening.py` makes one from a URL.
"""
