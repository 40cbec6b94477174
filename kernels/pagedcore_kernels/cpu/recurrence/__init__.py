"""What a layer keeps of earlier tokens other than keys and values, on the CPU."""
