"""Sequential CIFAR-10 in colour and MNIST."""
