"""scripts/soak: many mounts under readers, writers, faults and disturbances, with checks of what must hold."""
