"""What authors of plugins test with: conformance suites made from descriptors, and the scheduling simulator."""
