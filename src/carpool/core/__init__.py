"""Values, state tables and port contracts that all layers share. Imports no other layer."""
