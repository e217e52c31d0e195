// Makes a layer of a tar with the programs of others.
//
//	seekable FORMAT TAR LAYER
//
// FORMAT is estargz, stargz-chunked or containers-chunked. Prints the annotations that the layer has in a manifest,
// as JSON.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/containerd/stargz-snapshotter/estargz"
	"github.com/containerd/stargz-snapshotter/estargz/zstdchunked"
	"github.com/containers/storage/pkg/chunked/compressor"
	"github.com/klauspost/compress/zstd"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: seekable FORMAT TAR LAYER")
		os.Exit(2)
	}
	annotations, err := convert(os.Args[1], os.Args[2], os.Args[3])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(annotations)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "seekable:", err)
		os.Exit(1)
	}
}

func convert(format, source, target string) (map[string]string, error) {
	tar, err := os.Open(source)
	if err != nil {
		return nil, err
	}
	defer tar.Close()
	layer, err := os.Create(target)
	if err != nil {
		return nil, err
	}
	defer layer.Close()
	annotations := map[string]string{}
	switch format {
	case "estargz":
		return annotations, stargz(tar, layer, annotations)
	case "stargz-chunked":
		compressor := &zstdchunked.Compressor{CompressionLevel: zstd.SpeedDefault, Metadata: annotations}
		return annotations, stargz(tar, layer, annotations, estargz.WithCompression(&chunked{compressor, &zstdchunked.Decompressor{}}))
	case "containers-chunked":
		writer, err := compressor.ZstdCompressor(layer, annotations, nil)
		if err != nil {
			return nil, err
		}
		if _, err := io.Copy(writer, tar); err != nil {
			return nil, err
		}
		return annotations, writer.Close()
	}
	return nil, fmt.Errorf("no format %q", format)
}

// Both directions of zstd:chunked, as the package wants them.
type chunked struct {
	*zstdchunked.Compressor
	*zstdchunked.Decompressor
}

func stargz(tar *os.File, layer io.Writer, annotations map[string]string, options ...estargz.Option) error {
	info, err := tar.Stat()
	if err != nil {
		return err
	}
	blob, err := estargz.Build(io.NewSectionReader(tar, 0, info.Size()), options...)
	if err != nil {
		return err
	}
	defer blob.Close()
	if _, err := io.Copy(layer, blob); err != nil {
		return err
	}
	annotations[estargz.TOCJSONDigestAnnotation] = blob.TOCDigest().String()
	return nil
}
