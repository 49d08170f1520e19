"""The durable side: tables, the one writer, the codec, migrations and reads. Nothing else touches the database file."""
