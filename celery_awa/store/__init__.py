"""The only layer that knows psycopg: protocol, canonical storage, migrations, embedded server."""
