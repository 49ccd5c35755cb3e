"""Operations that run together: their interface, the fusion rules, and the container that applies the rules."""
