"""The client without bytes: traces of block hashes played through a manager."""
