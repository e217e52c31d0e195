// Command stargz is what the benchmark HelloBench needs of stargz-snapshotter, whose own commands are a Go module that is not
// published: the packages below are what containerd-stargz-grpc and `ctr-remote image convert --estargz` are made of.
//
//	stargz serve --address SOCKET --root DIRECTORY
//	stargz convert SOURCE TARGET
//	stargz version
//
// SOURCE and TARGET are OCI layout directories; the first image of SOURCE becomes the only one of TARGET.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "stargz:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, words []string) error {
	switch {
	case len(words) == 5 && words[0] == "serve" && words[1] == "--address" && words[3] == "--root":
		return serve(ctx, words[2], words[4])
	case len(words) == 3 && words[0] == "convert":
		return convert(ctx, words[1], words[2])
	case len(words) == 1 && words[0] == "version":
		fmt.Println(version())
		return nil
	}
	return fmt.Errorf("usage: stargz serve --address SOCKET --root DIRECTORY | convert SOURCE TARGET | version")
}

// version is that of stargz-snapshotter, which go.mod names.
func version() string {
	info, _ := debug.ReadBuildInfo()
	for _, module := range info.Deps {
		if module.Path == "github.com/containerd/stargz-snapshotter" {
			return module.Version
		}
	}
	return "unknown"
}
