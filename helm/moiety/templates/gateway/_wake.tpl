{{/* Requests that wake sleeping engines and start pools without replicas. */}}

{{/* The names of the StatefulSets that the gateways scale, as a JSON list. */}}
{{- define "moiety.scaledPools" -}}
{{- $names := list -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- if eq $pool.scaleToZero "gateway" }}{{ $names = append $names (include "moiety.pool" (list $ $pool)) }}{{ end -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* The settings of the gateways, as JSON; empty if requests wake nothing. */}}
{{- define "moiety.wakeSettings" -}}
{{- $set := dict -}}
{{- if .Values.wakeOnRequest.enabled -}}
{{- $wake := .Values.wakeOnRequest -}}
{{- $set = dict "wake_on_request" true "wake_timeout_s" $wake.timeoutSeconds "sleep_after_s" $wake.sleepAfterSeconds -}}
{{- $models := list -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- if eq $pool.scaleToZero "gateway" }}{{ $models = append $models (printf "%s=%s" $pool.model.name (include "moiety.pool" (list $ $pool))) }}{{ end -}}
{{- if eq $pool.scaleToZero "keda" }}{{ $models = append $models $pool.model.name }}{{ end -}}
{{- end -}}
{{- if $models }}{{ $_ := set $set "scaled_models" $models }}{{ end -}}
{{- if include "moiety.scaledPools" . | fromJsonArray }}{{ $_ := set $set "stop_after_s" $wake.stopAfterSeconds }}{{ end -}}
{{- end -}}
{{- $set | toJson -}}
{{- end -}}
