"""Who can serve what: plugin discovery, the catalog of names, selection with reasons, dispatch by M. No torch here."""
