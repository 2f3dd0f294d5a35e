"""How an event reaches its receiver: which addresses are called, how it is signed and sent."""
