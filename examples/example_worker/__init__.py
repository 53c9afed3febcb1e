"""What the examples share: a server, a folder for messages, and a worker that is theirs alone.

None of it is needed in an application, which has a database, a broker and workers already.
"""
