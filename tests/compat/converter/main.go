// Command converter makes an image as upstream's converters do: nydusify and acceld are programs around the same package of
// nydus-snapshotter.
//
//	converter --builder NYDUS-IMAGE [--compressor NAME] [--fs-version 5] SOURCE TARGET
//
// SOURCE and TARGET are OCI layout directories; the first image of SOURCE becomes the only one of TARGET.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/images/converter"
	nydus "github.com/containerd/nydus-snapshotter/pkg/converter"
	"github.com/containerd/platforms"

	"lazuli/bench/contenders/layout"
)

func main() {
	builder := flag.String("builder", "nydus-image", "upstream's nydus-image")
	compressor := flag.String("compressor", "", "zstd, lz4_block or none")
	version := flag.String("fs-version", "6", "of RAFS")
	flag.Parse()
	if flag.NArg() != 2 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(*builder, *compressor, *version, flag.Arg(0), flag.Arg(1)); err != nil {
		fmt.Fprintln(os.Stderr, "converter:", err)
		os.Exit(1)
	}
}

func run(builder, compressor, version, source, target string) error {
	ctx := context.Background()
	work, err := os.MkdirTemp(filepath.Dir(target), "converter-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	store, err := layout.NewStore(filepath.Join(work, "content"))
	if err != nil {
		return err
	}
	image, err := layout.Load(ctx, store, source)
	if err != nil {
		return err
	}
	pack := nydus.PackOption{BuilderPath: builder, WorkDir: work, FsVersion: version, Compressor: compressor}
	merge := nydus.MergeOption{BuilderPath: builder, WorkDir: work, FsVersion: version}
	hooks := converter.ConvertHooks{PostConvertHook: nydus.ConvertHookFunc(merge)}
	convert := converter.IndexConvertFuncWithHook(nydus.LayerConvertFunc(pack), false, platforms.All, hooks)
	made, err := convert(ctx, store, image)
	if err != nil {
		return err
	}
	if made == nil {
		return errors.New("nothing was converted")
	}
	return layout.Save(ctx, store, *made, target)
}
